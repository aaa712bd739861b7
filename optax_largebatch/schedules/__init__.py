"""Schedules: pure functions of the step."""
