"""Engines that are servers, spoken to over HTTP."""
