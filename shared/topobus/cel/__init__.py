"""CEL as Kubernetes gives it to DRA: parsed, type-checked, its cost estimated and bounded, evaluated.

Pure: values in, values out. The selectors of the controller use it through `topobus.cel.selector`; nothing here knows of claims.
Source: github.com/google/cel-spec, langdef.md; the environment is that of k8s.io/apiserver/pkg/cel/environment, 1.36.
"""
