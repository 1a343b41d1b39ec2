// Made by tools/gen_contract_ts_java.py from the Python contract table; do not edit.

export const CONTRACT_TABLE = {
  "oldest": "0.9.2",
  "newest": "0.33.0",
  "algorithms": [
    {
      "name": "sha256",
      "serialization": "pickle5",
      "digest": "sha256",
      "keeps": "digest",
      "collision_resistant": true
    },
    {
      "name": "sha256_cbor",
      "serialization": "cbor",
      "digest": "sha256",
      "keeps": "digest",
      "collision_resistant": true
    },
    {
      "name": "sha256_cbor_64bit",
      "serialization": "cbor",
      "digest": "sha256",
      "keeps": "low64",
      "collision_resistant": true
    },
    {
      "name": "xxhash",
      "serialization": "pickle5",
      "digest": "xxh3_128",
      "keeps": "digest",
      "collision_resistant": false
    },
    {
      "name": "xxhash_cbor",
      "serialization": "cbor",
      "digest": "xxh3_128",
      "keeps": "digest",
      "collision_resistant": false
    }
  ],
  "rows": [
    {
      "since": "0.9.2",
      "algorithms": [
        "sha256"
      ],
      "chain_values": "int",
      "default_seed": null,
      "lora_key": "id",
      "multimodal_key": "identifier",
      "prompt_embeds_key": "absent",
      "tagged_keys": false,
      "lookahead": false,
      "events": {
        "layout": "array",
        "block_stored": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "parent_block_hash",
            "optional": false
          },
          {
            "name": "token_ids",
            "optional": false
          },
          {
            "name": "block_size",
            "optional": false
          },
          {
            "name": "lora_id",
            "optional": false
          }
        ],
        "block_removed": [
          {
            "name": "block_hashes",
            "optional": false
          }
        ],
        "hash_bytes": false,
        "replay_topic_frame": false
      }
    },
    {
      "since": "0.10.0",
      "algorithms": [
        "sha256",
        "sha256_cbor_64bit"
      ],
      "chain_values": "int",
      "default_seed": null,
      "lora_key": "id",
      "multimodal_key": "identifier",
      "prompt_embeds_key": "absent",
      "tagged_keys": false,
      "lookahead": false,
      "events": {
        "layout": "array",
        "block_stored": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "parent_block_hash",
            "optional": false
          },
          {
            "name": "token_ids",
            "optional": false
          },
          {
            "name": "block_size",
            "optional": false
          },
          {
            "name": "lora_id",
            "optional": false
          }
        ],
        "block_removed": [
          {
            "name": "block_hashes",
            "optional": false
          }
        ],
        "hash_bytes": false,
        "replay_topic_frame": false
      }
    },
    {
      "since": "0.10.2",
      "algorithms": [
        "sha256",
        "sha256_cbor"
      ],
      "chain_values": "bytes",
      "default_seed": null,
      "lora_key": "id",
      "multimodal_key": "identifier",
      "prompt_embeds_key": "absent",
      "tagged_keys": false,
      "lookahead": false,
      "events": {
        "layout": "array",
        "block_stored": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "parent_block_hash",
            "optional": false
          },
          {
            "name": "token_ids",
            "optional": false
          },
          {
            "name": "block_size",
            "optional": false
          },
          {
            "name": "lora_id",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          }
        ],
        "block_removed": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          }
        ],
        "hash_bytes": true,
        "replay_topic_frame": false
      }
    },
    {
      "since": "0.11.1",
      "algorithms": [
        "sha256",
        "sha256_cbor"
      ],
      "chain_values": "bytes",
      "default_seed": null,
      "lora_key": "name",
      "multimodal_key": "identifier",
      "prompt_embeds_key": "bytes",
      "tagged_keys": false,
      "lookahead": false,
      "events": {
        "layout": "array",
        "block_stored": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "parent_block_hash",
            "optional": false
          },
          {
            "name": "token_ids",
            "optional": false
          },
          {
            "name": "block_size",
            "optional": false
          },
          {
            "name": "lora_id",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          }
        ],
        "block_removed": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          }
        ],
        "hash_bytes": true,
        "replay_topic_frame": false
      }
    },
    {
      "since": "0.13.0",
      "algorithms": [
        "sha256",
        "sha256_cbor",
        "xxhash",
        "xxhash_cbor"
      ],
      "chain_values": "bytes",
      "default_seed": null,
      "lora_key": "name",
      "multimodal_key": "identifier",
      "prompt_embeds_key": "bytes",
      "tagged_keys": false,
      "lookahead": false,
      "events": {
        "layout": "array",
        "block_stored": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "parent_block_hash",
            "optional": false
          },
          {
            "name": "token_ids",
            "optional": false
          },
          {
            "name": "block_size",
            "optional": false
          },
          {
            "name": "lora_id",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          }
        ],
        "block_removed": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          }
        ],
        "hash_bytes": true,
        "replay_topic_frame": false
      }
    },
    {
      "since": "0.14.0",
      "algorithms": [
        "sha256",
        "sha256_cbor",
        "xxhash",
        "xxhash_cbor"
      ],
      "chain_values": "bytes",
      "default_seed": null,
      "lora_key": "name",
      "multimodal_key": "identifier",
      "prompt_embeds_key": "bytes",
      "tagged_keys": false,
      "lookahead": false,
      "events": {
        "layout": "array",
        "block_stored": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "parent_block_hash",
            "optional": false
          },
          {
            "name": "token_ids",
            "optional": false
          },
          {
            "name": "block_size",
            "optional": false
          },
          {
            "name": "lora_id",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "lora_name",
            "optional": false
          }
        ],
        "block_removed": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          }
        ],
        "hash_bytes": true,
        "replay_topic_frame": false
      }
    },
    {
      "since": "0.17.0",
      "algorithms": [
        "sha256",
        "sha256_cbor",
        "xxhash",
        "xxhash_cbor"
      ],
      "chain_values": "bytes",
      "default_seed": null,
      "lora_key": "name",
      "multimodal_key": "identifier",
      "prompt_embeds_key": "sha256",
      "tagged_keys": false,
      "lookahead": false,
      "events": {
        "layout": "array",
        "block_stored": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "parent_block_hash",
            "optional": false
          },
          {
            "name": "token_ids",
            "optional": false
          },
          {
            "name": "block_size",
            "optional": false
          },
          {
            "name": "lora_id",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "lora_name",
            "optional": false
          },
          {
            "name": "extra_keys",
            "optional": true
          }
        ],
        "block_removed": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          }
        ],
        "hash_bytes": true,
        "replay_topic_frame": false
      }
    },
    {
      "since": "0.19.0",
      "algorithms": [
        "sha256",
        "sha256_cbor",
        "xxhash",
        "xxhash_cbor"
      ],
      "chain_values": "bytes",
      "default_seed": null,
      "lora_key": "name",
      "multimodal_key": "identifier_and_offset",
      "prompt_embeds_key": "sha256",
      "tagged_keys": false,
      "lookahead": false,
      "events": {
        "layout": "array",
        "block_stored": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "parent_block_hash",
            "optional": false
          },
          {
            "name": "token_ids",
            "optional": false
          },
          {
            "name": "block_size",
            "optional": false
          },
          {
            "name": "lora_id",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "lora_name",
            "optional": false
          },
          {
            "name": "extra_keys",
            "optional": true
          }
        ],
        "block_removed": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          }
        ],
        "hash_bytes": true,
        "replay_topic_frame": false
      }
    },
    {
      "since": "0.20.0",
      "algorithms": [
        "sha256",
        "sha256_cbor",
        "xxhash",
        "xxhash_cbor"
      ],
      "chain_values": "bytes",
      "default_seed": null,
      "lora_key": "name",
      "multimodal_key": "identifier_and_offset",
      "prompt_embeds_key": "sha256",
      "tagged_keys": false,
      "lookahead": false,
      "events": {
        "layout": "array",
        "block_stored": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "parent_block_hash",
            "optional": false
          },
          {
            "name": "token_ids",
            "optional": false
          },
          {
            "name": "block_size",
            "optional": false
          },
          {
            "name": "lora_id",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "lora_name",
            "optional": false
          },
          {
            "name": "extra_keys",
            "optional": true
          },
          {
            "name": "group_idx",
            "optional": true
          }
        ],
        "block_removed": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "group_idx",
            "optional": true
          }
        ],
        "hash_bytes": true,
        "replay_topic_frame": false
      }
    },
    {
      "since": "0.22.0",
      "algorithms": [
        "sha256",
        "sha256_cbor",
        "xxhash",
        "xxhash_cbor"
      ],
      "chain_values": "bytes",
      "default_seed": null,
      "lora_key": "name",
      "multimodal_key": "identifier_and_offset",
      "prompt_embeds_key": "sha256",
      "tagged_keys": false,
      "lookahead": false,
      "events": {
        "layout": "array",
        "block_stored": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "parent_block_hash",
            "optional": false
          },
          {
            "name": "token_ids",
            "optional": false
          },
          {
            "name": "block_size",
            "optional": false
          },
          {
            "name": "lora_id",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "lora_name",
            "optional": false
          },
          {
            "name": "extra_keys",
            "optional": true
          },
          {
            "name": "group_idx",
            "optional": true
          },
          {
            "name": "kv_cache_spec_kind",
            "optional": true
          },
          {
            "name": "kv_cache_spec_sliding_window",
            "optional": true
          }
        ],
        "block_removed": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "group_idx",
            "optional": true
          }
        ],
        "hash_bytes": true,
        "replay_topic_frame": false
      }
    },
    {
      "since": "0.24.0",
      "algorithms": [
        "sha256",
        "sha256_cbor",
        "xxhash",
        "xxhash_cbor"
      ],
      "chain_values": "bytes",
      "default_seed": null,
      "lora_key": "name",
      "multimodal_key": "identifier_and_offset",
      "prompt_embeds_key": "sha256",
      "tagged_keys": false,
      "lookahead": false,
      "events": {
        "layout": "map",
        "block_stored": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "parent_block_hash",
            "optional": false
          },
          {
            "name": "token_ids",
            "optional": false
          },
          {
            "name": "block_size",
            "optional": false
          },
          {
            "name": "lora_id",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "lora_name",
            "optional": false
          },
          {
            "name": "extra_keys",
            "optional": true
          },
          {
            "name": "group_idx",
            "optional": true
          },
          {
            "name": "kv_cache_spec_kind",
            "optional": true
          },
          {
            "name": "kv_cache_spec_sliding_window",
            "optional": true
          }
        ],
        "block_removed": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "group_idx",
            "optional": true
          }
        ],
        "hash_bytes": true,
        "replay_topic_frame": false
      }
    },
    {
      "since": "0.26.0",
      "algorithms": [
        "sha256",
        "sha256_cbor",
        "xxhash",
        "xxhash_cbor"
      ],
      "chain_values": "bytes",
      "default_seed": null,
      "lora_key": "name",
      "multimodal_key": "identifier_and_offset",
      "prompt_embeds_key": "sha256",
      "tagged_keys": false,
      "lookahead": false,
      "events": {
        "layout": "map",
        "block_stored": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "parent_block_hash",
            "optional": false
          },
          {
            "name": "token_ids",
            "optional": false
          },
          {
            "name": "block_size",
            "optional": false
          },
          {
            "name": "lora_id",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "lora_name",
            "optional": false
          },
          {
            "name": "extra_keys",
            "optional": true
          },
          {
            "name": "group_idx",
            "optional": true
          },
          {
            "name": "kv_cache_spec_kind",
            "optional": true
          },
          {
            "name": "kv_cache_spec_sliding_window",
            "optional": true
          },
          {
            "name": "locality",
            "optional": true
          }
        ],
        "block_removed": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "group_idx",
            "optional": true
          },
          {
            "name": "locality",
            "optional": true
          }
        ],
        "hash_bytes": true,
        "replay_topic_frame": true
      }
    },
    {
      "since": "0.29.0",
      "algorithms": [
        "sha256",
        "sha256_cbor",
        "xxhash",
        "xxhash_cbor"
      ],
      "chain_values": "bytes",
      "default_seed": "vllm-none-hash",
      "lora_key": "name",
      "multimodal_key": "identifier_and_offset",
      "prompt_embeds_key": "sha256",
      "tagged_keys": false,
      "lookahead": false,
      "events": {
        "layout": "map",
        "block_stored": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "parent_block_hash",
            "optional": false
          },
          {
            "name": "token_ids",
            "optional": false
          },
          {
            "name": "block_size",
            "optional": false
          },
          {
            "name": "lora_id",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "lora_name",
            "optional": false
          },
          {
            "name": "extra_keys",
            "optional": true
          },
          {
            "name": "group_idx",
            "optional": true
          },
          {
            "name": "kv_cache_spec_kind",
            "optional": true
          },
          {
            "name": "kv_cache_spec_sliding_window",
            "optional": true
          },
          {
            "name": "locality",
            "optional": true
          },
          {
            "name": "ownership",
            "optional": true
          }
        ],
        "block_removed": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "group_idx",
            "optional": true
          },
          {
            "name": "locality",
            "optional": true
          },
          {
            "name": "ownership",
            "optional": true
          }
        ],
        "hash_bytes": true,
        "replay_topic_frame": true
      }
    },
    {
      "since": "0.30.0",
      "algorithms": [
        "sha256",
        "sha256_cbor",
        "xxhash",
        "xxhash_cbor"
      ],
      "chain_values": "bytes",
      "default_seed": "vllm-none-hash",
      "lora_key": "name",
      "multimodal_key": "identifier_and_offset",
      "prompt_embeds_key": "sha256",
      "tagged_keys": false,
      "lookahead": false,
      "events": {
        "layout": "map",
        "block_stored": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "parent_block_hash",
            "optional": false
          },
          {
            "name": "token_ids",
            "optional": false
          },
          {
            "name": "block_size",
            "optional": false
          },
          {
            "name": "lora_id",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "lora_name",
            "optional": false
          },
          {
            "name": "extra_keys",
            "optional": true
          },
          {
            "name": "group_idx",
            "optional": true
          },
          {
            "name": "kv_cache_spec_kind",
            "optional": true
          },
          {
            "name": "kv_cache_spec_sliding_window",
            "optional": true
          },
          {
            "name": "locality",
            "optional": true
          },
          {
            "name": "ownership",
            "optional": true
          },
          {
            "name": "session_id",
            "optional": true
          }
        ],
        "block_removed": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "group_idx",
            "optional": true
          },
          {
            "name": "locality",
            "optional": true
          },
          {
            "name": "ownership",
            "optional": true
          }
        ],
        "hash_bytes": true,
        "replay_topic_frame": true
      }
    },
    {
      "since": "0.31.0",
      "algorithms": [
        "sha256",
        "sha256_cbor",
        "xxhash",
        "xxhash_cbor"
      ],
      "chain_values": "bytes",
      "default_seed": "vllm-none-hash",
      "lora_key": "name_and_path",
      "multimodal_key": "identifier_and_offset",
      "prompt_embeds_key": "sha256",
      "tagged_keys": true,
      "lookahead": false,
      "events": {
        "layout": "map",
        "block_stored": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "parent_block_hash",
            "optional": false
          },
          {
            "name": "token_ids",
            "optional": false
          },
          {
            "name": "block_size",
            "optional": false
          },
          {
            "name": "lora_id",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "lora_name",
            "optional": false
          },
          {
            "name": "extra_keys",
            "optional": true
          },
          {
            "name": "group_idx",
            "optional": true
          },
          {
            "name": "kv_cache_spec_kind",
            "optional": true
          },
          {
            "name": "kv_cache_spec_sliding_window",
            "optional": true
          },
          {
            "name": "locality",
            "optional": true
          },
          {
            "name": "ownership",
            "optional": true
          },
          {
            "name": "session_id",
            "optional": true
          }
        ],
        "block_removed": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "group_idx",
            "optional": true
          },
          {
            "name": "locality",
            "optional": true
          },
          {
            "name": "ownership",
            "optional": true
          }
        ],
        "hash_bytes": true,
        "replay_topic_frame": true
      }
    },
    {
      "since": "0.33.0",
      "algorithms": [
        "sha256",
        "sha256_cbor",
        "xxhash",
        "xxhash_cbor"
      ],
      "chain_values": "bytes",
      "default_seed": "vllm-none-hash",
      "lora_key": "name_and_path",
      "multimodal_key": "identifier_and_offset",
      "prompt_embeds_key": "sha256",
      "tagged_keys": true,
      "lookahead": true,
      "events": {
        "layout": "map",
        "block_stored": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "parent_block_hash",
            "optional": false
          },
          {
            "name": "token_ids",
            "optional": false
          },
          {
            "name": "block_size",
            "optional": false
          },
          {
            "name": "lora_id",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "lora_name",
            "optional": false
          },
          {
            "name": "extra_keys",
            "optional": true
          },
          {
            "name": "group_idx",
            "optional": true
          },
          {
            "name": "kv_cache_spec_kind",
            "optional": true
          },
          {
            "name": "kv_cache_spec_sliding_window",
            "optional": true
          },
          {
            "name": "locality",
            "optional": true
          },
          {
            "name": "ownership",
            "optional": true
          },
          {
            "name": "session_id",
            "optional": true
          },
          {
            "name": "lookahead_token_ids",
            "optional": true
          }
        ],
        "block_removed": [
          {
            "name": "block_hashes",
            "optional": false
          },
          {
            "name": "medium",
            "optional": false
          },
          {
            "name": "group_idx",
            "optional": true
          },
          {
            "name": "locality",
            "optional": true
          },
          {
            "name": "ownership",
            "optional": true
          }
        ],
        "hash_bytes": true,
        "replay_topic_frame": true
      }
    }
  ]
} as const;
