"""octavo.core.runner"""
