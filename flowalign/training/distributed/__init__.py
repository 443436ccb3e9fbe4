"""Networks spread over processes, and processes that are lost."""
