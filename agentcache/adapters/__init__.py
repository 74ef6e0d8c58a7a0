"""Adapters beside the base model: by name, in use, and on the device."""
