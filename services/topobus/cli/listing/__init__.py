"""What every listing takes: label selectors, JSON paths, forms of output, sorting and watching."""
