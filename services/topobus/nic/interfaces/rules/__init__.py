"""The pure part of interfaces: functions of values, without a kernel."""
