"""`python -m lab.conformance FILE...`: recorded answers of Kubernetes' own code compared with
ours.
"""

from lab.conformance.recorded_answers import main

if __name__ == "__main__":
    raise SystemExit(main())
