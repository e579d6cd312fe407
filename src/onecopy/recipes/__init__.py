"""Recipes: the training job behind `onecopy train`."""
