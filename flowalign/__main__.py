"""`python -m flowalign`, and `accelerate launch -m flowalign`."""

from flowalign.cli.main import main

if __name__ == "__main__":
    main()
