"""Entry point of `python -m router`: runs one router process (`router.process`)."""

from baton import garbage

if __name__ == "__main__":
    garbage.collect_seldom()

    from router.process import main

    garbage.keep_modules()
    main()
