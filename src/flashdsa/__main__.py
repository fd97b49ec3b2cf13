"""`python -m flashdsa`: the same as the console script `flashdsa`."""

from flashdsa.cli.main import main

if __name__ == "__main__":
    main()
