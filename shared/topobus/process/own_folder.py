"""Checks that only this user can write to a folder.

In a folder where others can write, a planted link could redirect our writes to any of our files.
"""

from __future__ import annotations

import os
import stat

__all__ = ["objection_to_folder"]


def objection_to_folder(found_stat: os.stat_result) -> str:
    """Name the reason why others could change a folder's content. Empty when only this user can.

    Shapes: found_stat — of the folder itself, not of a link to it, and preferably of an open one,
    because a name may belong to another folder a moment later.
    """
    if found_stat.st_uid != os.geteuid():
        return f"belongs to user {found_stat.st_uid}, not to you ({os.geteuid()})"
    if found_stat.st_mode & stat.S_IWOTH or (found_stat.st_mode & stat.S_IWGRP and found_stat.st_gid != os.getegid()):
        return f"may be written by others (mode {stat.S_IMODE(found_stat.st_mode):o})"
    return ""
