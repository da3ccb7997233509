"""`python -m verl_shard`: the command, where its script is not on the PATH."""

from verl_shard.cli.main import main

if __name__ == "__main__":
    main()
