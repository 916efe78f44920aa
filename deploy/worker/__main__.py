"""`python -m deploy.worker`: the process of one worker (`deploy.worker.process`)."""

from baton import garbage

if __name__ == "__main__":
    garbage.collect_seldom()

    from deploy.worker.process import main

    garbage.keep_modules()
    main()
