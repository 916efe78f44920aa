"""`python -m deploy.worker`: the process of one worker (`deploy.worker.process`)."""

from deploy.worker.process import main

if __name__ == "__main__":
    main()
