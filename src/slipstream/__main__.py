"""``python -m slipstream``: the command line."""

from slipstream.apps.cli import main

if __name__ == "__main__":
    main()
