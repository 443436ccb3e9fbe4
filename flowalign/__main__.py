"""`python -m flowalign`, and `accelerate launch -m flowalign`."""

from flowalign.app.cli.main import main

if __name__ == "__main__":
    main()
