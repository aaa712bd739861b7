"""Which parameters: rules by name and shape, masks, groups."""
