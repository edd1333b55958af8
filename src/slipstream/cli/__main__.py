"""``python -m slipstream.cli``: the command line where the console script is not on the PATH."""

from slipstream.cli import main

if __name__ == "__main__":
    main()
