"""`python -m deploy.controller`: the controller's process (`deploy.controller.process`)."""

from baton import garbage

if __name__ == "__main__":
    garbage.collect_seldom()

    from deploy.controller.process import main

    main()
