"""`python -m router`: the process of one router (`router.process`)."""

from baton import garbage

if __name__ == "__main__":
    garbage.collect_seldom()

    from router.process import main

    garbage.keep_modules()
    main()
