"""octavo.core.engine"""
