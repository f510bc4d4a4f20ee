"""The commands of `kvasir`, each of which calls its room. What only some of them need is imported when they run."""
