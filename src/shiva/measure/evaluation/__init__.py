"""`shiva eval`: what is lost in quality and won in cost, for any pipeline and any set of methods."""
