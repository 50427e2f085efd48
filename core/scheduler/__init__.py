"""octavo.core.scheduler"""
