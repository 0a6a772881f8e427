"""``python -m meka`` is the command ``meka``."""

from meka.lab.cli import main

if __name__ == "__main__":
    main()
