"""The embedded default model: data, towers, autoencoder, transformer, assembly and scores, one module each."""
