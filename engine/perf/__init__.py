"""What a machine allows, what a model costs, and what a reply got."""
