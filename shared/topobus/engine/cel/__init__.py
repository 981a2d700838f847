"""CEL as Kubernetes offers it to DRA: parsed, type-checked, its cost estimated and bounded,
evaluated.

Pure: values in, values out. The controller's selectors use it through
`topobus.engine.cel.selector`. It does not depend on claims.
Source: github.com/google/cel-spec, langdef.md; the environment is that of
k8s.io/apiserver/pkg/cel/environment, 1.36.
"""
