"""`python -m topobus.testing.apiserver`: the API server simulator as a program; prints its address."""

from topobus.testing.apiserver.simulator import main

if __name__ == "__main__":
    main()
