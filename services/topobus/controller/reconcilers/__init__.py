"""The reconcilers, one file for each job: each compares the stored state with the desired one and writes the next step."""
