"""`python -m deploy.cli` is the `baton` command, also where no script of that name is installed."""

from deploy.cli import main

if __name__ == "__main__":
    main()
