"""`python -m deploy.cli`: the `baton` command, even if no script of that name is installed."""

from deploy.cli import main

if __name__ == "__main__":
    main()
