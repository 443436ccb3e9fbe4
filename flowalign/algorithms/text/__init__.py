"""Policy gradients over tokens: one short file a method."""
