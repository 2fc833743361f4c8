"""`python -m jetrl`: the command line, as torchrun starts it."""

from jetrl.cli import main

if __name__ == "__main__":
    main()
