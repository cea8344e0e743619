"""The layers of `tfplugin.keras` and `tfplugin.tf_keras`: one code, of which each Keras gets classes of its own."""
