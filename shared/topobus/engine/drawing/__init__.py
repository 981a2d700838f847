"""The drawing of a machine as a value: the devices in each NUMA node, their owners and their
health.

The CLI writes it as text, the console as a page. `layout` combines the results of `letters`
(owners) and `leaves` (devices). Nothing here depends on a colour, a width or a medium.
"""
