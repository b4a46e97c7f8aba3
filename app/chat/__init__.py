"""The chat without a screen: what the full-screen and the plain chat share."""
