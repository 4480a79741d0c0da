"""``python -m cbatch`` and the command ``cbatch``. Imports nothing before Ctrl-C can end it quietly."""

import sys


def main() -> None:
    try:
        from cbatch.cli import app
    except KeyboardInterrupt:  # the imports take a tenth of a second
        sys.exit(130)
    app(prog_name="cbatch")


if __name__ == "__main__":
    main()
