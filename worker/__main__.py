"""`python -m worker`: the process of one worker (`worker.process`)."""

from baton import garbage

if __name__ == "__main__":
    garbage.collect_seldom()

    from worker.process import main

    garbage.keep_modules()
    main()
