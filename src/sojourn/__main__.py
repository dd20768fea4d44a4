"""`python -m sojourn` is the same as `sojourn`."""

from sojourn.cli.main import main

if __name__ == "__main__":
    main()
