"""`python -m deltafin` lists the commands."""

from deltafin.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
