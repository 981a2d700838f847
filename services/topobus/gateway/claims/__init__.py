"""kubelet's DRA calls: claims prepared and unprepared, and the checkpoint
of what is prepared here.
"""
