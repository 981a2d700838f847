"""What every listing uses: label selectors, JSON paths, forms of output, sorting and watching."""
