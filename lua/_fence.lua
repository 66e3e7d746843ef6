-- The guard of scripts that act for an owner: the token of the call must equal the one in the
-- fence.
--
-- Tokens are only compared for equality, because they have no order. If the fence contains no
-- token, HMGET returns false, which equals no argument, so every call is rejected. `superseded`
-- returns the reply that rejects the call, or nil followed by the token, epoch and owner in the
-- fence.

local function superseded(fence, token)
  local held = redis.call('HMGET', fence, 'token', 'epoch', 'owner')
  if held[1] ~= token then
    return {'FENCED', held[2] or '0', held[3] or ''}
  end
  return nil, held
end
