module topobus.dev/examples/go-health-subscriber

go 1.21
