"""Planning: a pod's demands, what is free on a node, and the search for a placement with its
reasons.
"""
