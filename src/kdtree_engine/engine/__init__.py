"""Requests on a model: scheduling, the step, the offline API."""
