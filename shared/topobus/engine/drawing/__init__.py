"""The drawing of a machine as a value: what stands in which NUMA node, who holds it and how well it
is.

The CLI writes it as text, the console as a page. `layout` puts together what `letters` (owners) and
`leaves` (devices) tell. Nothing here knows a colour, a width or a medium.
"""
