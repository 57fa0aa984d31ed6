"""Run the command line as `python -m weightsync`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
