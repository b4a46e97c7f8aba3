"""The scripts that make the tables in assets, and the published speeds that the roofline is fitted to."""
