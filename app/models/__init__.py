"""The models to choose from: on this disk, in the catalogue, on the hub; how they would run here; and getting them."""
