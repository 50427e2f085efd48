"""octavo.core.text"""
