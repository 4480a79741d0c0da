"""CPU planning: which sequences run next, and where their keys and values lie. Imports numpy, never torch."""
